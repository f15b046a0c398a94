"""Files of samples: which there are, what is in them, and which samples are held out."""
