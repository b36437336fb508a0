"""Shell: `runfold bench`: Runfold beside the raw appends it stands on, as ratios (R81-R86).

Each module is one workload (w1 to w6) or one thing they share. Every measurement brings servers and
processes of its own, in a directory that is removed again.
"""
