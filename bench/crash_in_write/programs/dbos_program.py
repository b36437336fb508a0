"""DBOS: a workflow of steps; the approval is a message. `DBOS.launch()` recovers what was pending.

usage: dbos_program.py begin|recover|resume FOLDER [MAX_RECOVERY_ATTEMPTS]
"""

import json
import sys
import time

import ledger
from dbos import DBOS, DBOSConfig, SetWorkflowID

MODE, FOLDER, *REST = sys.argv[1:]
RECOVERIES = int(REST[0]) if REST else 100  # theirs by default
ID = "order-1"
END_WAIT_S = 30
GOING = ("ENQUEUED", "PENDING")


@DBOS.step()
def model(prompt: str) -> dict[str, int]:
    return {"amount": 10}


@DBOS.step()
def charge(amount: int) -> str:
    return ledger.charge(amount)


@DBOS.workflow(max_recovery_attempts=RECOVERIES)
def order(prompt: str) -> str:
    asked = model(prompt)
    if not DBOS.recv("approval", timeout_seconds=60):
        return "rejected"
    return charge(asked["amount"])


config: DBOSConfig = {"name": "till", "system_database_url": f"sqlite:///{FOLDER}/dbos.sqlite"}
DBOS(config=config)
DBOS.launch()
if MODE == "begin":
    with SetWorkflowID(ID):
        handle = DBOS.start_workflow(order, "charge 10")
    DBOS.send(ID, True, "approval")
    handle.get_result()
else:
    if MODE == "resume":  # what an operator does with a workflow that was set aside
        DBOS.resume_workflow(ID)
    end = time.monotonic() + END_WAIT_S
    while (status := DBOS.get_workflow_status(ID)).status in GOING and time.monotonic() < end:
        time.sleep(0.1)
    steps = [step["function_name"] for step in DBOS.list_workflow_steps(ID)]
    seen = f"recovery_attempts={status.recovery_attempts}; steps {', '.join(steps)}"
    print(json.dumps({"state": status.status, "seen": seen}))
DBOS.destroy()
