"""Train the runs of a grid."""
