"""metrics.jsonl and TensorBoard."""
