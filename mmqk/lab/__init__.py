"""From grids to pages. Imports no torch.

grid      a grid file: arms, seeds, claims
runner    trains its runs
runs      reads run folders; study: the runs of a folder with their arms and claims
metrics   the numbers of runs that claims compare
effects   differences of arms with their intervals; counts: differences of shares
verdicts  the verdict of each claim
page      the report

`remedies` reads remedies.yaml; `formatting` writes numbers as text and renders templates.
"""
