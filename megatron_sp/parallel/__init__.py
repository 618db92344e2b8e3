"""How one model is spread over many ranks. Never imports model, data or train."""
