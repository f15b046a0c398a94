"""Measures any model, for `mmqk.monitors.attach`, the checks before training, and `mmqk diagnose --model`.

`attach.Watch.step` begins a probe, which passes through these files:

1. `inputs`: the model's last call (`LastCall`), its token ids and padding, cut to the first sequences;
   `mmqk.monitors.modalities` gives each token its modality.
2. `probe`: `Prober` runs the model once more on them; `isolate` restores what this changes, and
   `measurement.failed_here` tells all ranks if it failed on one.
3. `capture`: `Capture` gets every torch function of the pass and recognizes attention; `calls` reads its arguments as a
   `Call`. `trace` follows which inputs a tensor comes from, and attention that a model writes as matmul and softmax.
4. `measurement`: `Measurement` assigns the call to a sequence of tokens (`Side`), and passes queries and keys to
   `mmqk.monitors.collect.Collector`, which computes the statistics (`mmqk.monitors.formulas`) and their tags.
5. `layers`: which layers were measured, and their matrices; its `Stream` is filled during `capture`.

Apart from probes, `steps` measures losses, gradients and updates. `output` prints and writes the numbers.
"""
