"""Which sequence comes when: documents, packing, order."""
