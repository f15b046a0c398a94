"""The inspect page: what a model will be trained on."""
