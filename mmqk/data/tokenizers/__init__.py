"""Convert text and images to ids and back, and join their ids into one vocabulary."""
