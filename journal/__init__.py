"""journal: the run's records, their fold, the decisions over it, and the stores that keep them.

Reading order: ids, records, codec, step_state, fold, steps, claims, signals (core: no I/O); then
store (the protocol and its three answers), stores/, log (the append rule), handle, stepping,
ownership, doors.
"""
