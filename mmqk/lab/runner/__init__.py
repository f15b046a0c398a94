"""Train the runs of a grid.

session    one call of ``mmqk ablate``: plans, writes ablation.json, gives tasks to the pool
plan       which runs can start, and which wait for others
pool       trains tasks, several at a time
executors  where they train: this machine, SLURM or Ray
server     the process that the runs on this machine are forked from
watch      the state of runs while they train, for ``mmqk watch`` and ``mmqk ablate``
"""
