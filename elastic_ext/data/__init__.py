"""Loading data: batches made by worker processes that come and go while training runs."""
