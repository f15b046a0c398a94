"""Trains a model: one step, the callbacks around it, logging, and forks. `mmqk.train` puts the parts together.

The initial weights, and one optimizer step in the order of the calls:

| what                                    | where                                                                  |
| --------------------------------------- | ---------------------------------------------------------------------- |
| initial weights                         | `EarlyFusionTransformer`; of µP `optimizers.scale_initial`             |
| loss by modality                        | `module.TrainingModule.training_step` with `losses.modality_losses`    |
| backward pass                           | `module.TrainingModule.backward`                                       |
| clipping, and the record of the step    | `module.TrainingModule.configure_gradient_clipping`                    |
| update, learning rate                   | `optimizers.make_optimizer`, `optimizers.lr_multiplier`                |
| remedies that change weights            | `module.TrainingModule._after_update`                                  |
| log, divergence                         | the callback `callbacks.StepLog`                                       |
| probe of the new weights                | the callback `mmqk.monitors.own.callback.RunMonitor`                   |
| validation, alarms                      | the callbacks `Validation`, `Alarms` of `callbacks`                    |
| checkpoint, status, end after a signal  | the callbacks `Checkpoints`, `Lifecycle` of `saving`                   |
| where the numbers go                    | `loggers`: metrics.jsonl (`RunLogger`), TensorBoard (`StoryLogger`)    |

`ranks` starts the processes of a run, `device` chooses kernels and settings, and `fork` makes the first checkpoint of a
fork.
"""
