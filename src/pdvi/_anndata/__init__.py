"""The only code that knows where things lie in an AnnData."""
