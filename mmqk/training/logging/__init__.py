"""Loggers: metrics.jsonl, TensorBoard, CSV, W&B and MLflow."""
