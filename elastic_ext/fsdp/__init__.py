"""Models whose parameters are spread over ranks."""
