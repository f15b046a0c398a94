"""From samples to token batches: the token cache, the mixture of sequences, the datamodule."""
