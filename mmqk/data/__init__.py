"""From shards to batches. A run reads its documents from a token folder, from shards, or from the dial:

```
small shards ── tokenizers ── token folder in data.cache ─┐   data.read=tokens, the default
token folder of `mmqk data tokenize` ─────────────────────┤
shards ── tokenizers ── stream ───────────────────────────┼── order, sequences ── loader ── TokenBatch
dial ─────────────────────────────────────────────────────┘   (stream: data.read=shards)
held-out documents ── sequences ── validation, and probes with monitor.probe_split=heldout
```

```
config                     the fields of `data.*`, and the part of the run's identity that they give
datamodule                 opens the sources of a run, and makes its order and validation set

shards/files               which shards a pattern, a folder or a URL names; the samples of a tar, by offset
shards/read                the samples of a shard, front to back from any sample on
shards/samples, images     a sample: its texts and images, or the reason why it is dropped
shards/manifest            which samples are in which split; pairs and text of shards with a manifest, as in data/
tokenizers/files, image    texts to ids, the files of the tokenizers, the joint vocabulary; images to codes
tokenizers/train           `mmqk data tokenizers`; training_data: what it reads; train_image: the autoencoder's training
tokens/folder              the folder that stores documents as ids; the joint vocabulary (`Layout`)
tokens/encode              documents to ids; the documents of a source: a token folder, or small shards, once
tokens/tokenize            `mmqk data tokenize`: shards to a token folder
tokens/ids                 `mmqk data ids`: arrays of ids of other tokenizers to a token folder

stream                     documents of shards that are read during training, in lanes
dial, dial_coupling        the synthetic source: documents with known entropies

mixture, order             which document is in which sequence: a function of (config, seed, index)
sequences, batch           documents to sequences, and sequences to a TokenBatch
loader                     the batches of a run, by rank and worker
```
"""
