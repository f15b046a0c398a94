"""From shards to batches. Read the files in this order:

```
shards/archives           tars of samples, by offset, and files of lines
shards/samples, images    a sample: its texts and images, or the reason why it is dropped
shards/manifest           which samples are in which split; the shipped shards
tokenizers/files, image   texts and images to ids; train and vq train the tokenizers on the data of source
tokens/encode             documents to ids, and shards to the parts of a token folder (`tokenize`)
tokens/folder             the folder that stores them; `ids` makes one from arrays of ids
tokens/cache              token folders of shards, made at the first run
stream/                   instead of a token folder: shards that are read during training, divided into lanes
coupling, dial            documents with known entropies, instead of a token folder
mixture, order            which document is in which sequence: a function of (config, seed, index)
sequences, batch          documents to sequences, and sequences to a TokenBatch
datamodule                the batches of a run, by rank and worker; config: its fields
```
"""
