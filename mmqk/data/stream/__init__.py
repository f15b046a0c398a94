"""Documents that a run reads from shards while it trains, in an order that any resume continues exactly."""
