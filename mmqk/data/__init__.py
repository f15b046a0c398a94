"""From shards to batches. Read the files in this order:

```
shards/tars, lines        a shard: the files of each sample, lines of text
shards/samples, images    a sample: its texts and images, or the reason why it is dropped
shards/manifest, pairs    the shipped shards: splits and hashes; held_out: the split of any other sample
tokenizers/               texts and images to ids; source, train, vq train the tokenizers
tokens/encode, folder     ids of documents, and the folder that stores them
tokens/worker             shards to the parts of a token folder (`tokenize`); `ids` makes one from arrays of ids
tokens/cache, online      token folders of shards, made at the first run; pairs that are encoded during training
synthetic/                documents with known entropies, instead of a token folder
mixture, order/order      which document is in which sequence: a function of (config, seed, index)
order/packing, sequences  documents to sequences, and sequences to a TokenBatch (`batch`)
datamodule                the batches of a run, by rank and worker; config: its fields; statistics: its tokens
```
"""
