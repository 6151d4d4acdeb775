"""Worker processes that make batches, started and retired while training goes on."""
