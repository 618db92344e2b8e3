"""Which keys a query sees: documents and windows, and the work that follows from them."""
