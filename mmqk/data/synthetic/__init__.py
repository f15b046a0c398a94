"""The entropy dial: synthetic documents with known statistics."""
