"""Shell: the doors of a fleet: HTTP, NATS requests, published signals, and a page.

Read it in this order: `operation.py` (what an operation is), `runs.py`, `talking.py`, `looking.py`
(the operations), `app.py` (how a request reaches one), `sse.py` and `feed.py` (following a run),
`service.py` (what runs while `runfold bridge` does). Every rule is the journal's.
"""
