"""Archives of samples: tars, images, manifests."""
