"""Where the time of training goes, and what holds it up."""
