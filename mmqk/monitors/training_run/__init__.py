"""Our own model while it trains: when a probe is due, and what only its optimizer and gradients can tell."""
