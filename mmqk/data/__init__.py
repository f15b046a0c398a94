"""Samples to token batches: shards, the mix of sequences, the token cache, the datamodule."""
