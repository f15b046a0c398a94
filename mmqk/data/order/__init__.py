"""Build the sequences of a run: rows from documents, packing, and the order of the rows."""
