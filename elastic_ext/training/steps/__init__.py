"""One micro-step after another, until a step commits or is rolled back."""
