"""posembed inside other libraries."""
