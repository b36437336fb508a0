"""Temporal: a workflow of activities; the approval is a signal.

usage: temporal_program.py ADDRESS worker            works until it is ended
       temporal_program.py ADDRESS begin [ATTEMPTS]  starts the workflow, approves
       temporal_program.py ADDRESS end               waits for the end, says what is seen
       temporal_program.py ADDRESS reset             an operator's way on: from before the charge

ATTEMPTS: the charge's `maximum_attempts`; left out it is theirs, without limit.
"""

import asyncio
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import ledger
from temporalio import activity, workflow
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest
from temporalio.client import Client, WorkflowFailureError
from temporalio.common import RetryPolicy
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

ADDRESS, MODE, *REST = sys.argv[1:]
ID, QUEUE = "order-1", "till"
CHARGE_WAIT = timedelta(seconds=3)
"""How a dead worker is noticed: the longest a charge may take."""


@activity.defn
async def model(prompt: str) -> int:
    return 10


@activity.defn
def charge(amount: int) -> str:
    return ledger.charge(amount)


@workflow.defn
class Order:
    def __init__(self) -> None:
        self.approved = False

    @workflow.signal
    def approve(self) -> None:
        self.approved = True

    @workflow.run
    async def run(self, attempts: int) -> str:
        amount = await workflow.execute_activity(
            model, "charge 10", start_to_close_timeout=CHARGE_WAIT
        )
        await workflow.wait_condition(lambda: self.approved)
        retry = RetryPolicy(maximum_attempts=attempts)
        return await workflow.execute_activity(
            charge, amount, start_to_close_timeout=CHARGE_WAIT, retry_policy=retry
        )


async def work(client: Client) -> None:
    worker = Worker(
        client,
        task_queue=QUEUE,
        workflows=[Order],
        activities=[model, charge],
        activity_executor=ThreadPoolExecutor(4),
        workflow_runner=UnsandboxedWorkflowRunner(),
    )
    await worker.run()


async def end(client: Client) -> None:
    handle = client.get_workflow_handle(ID)
    cause: BaseException | None = None
    try:
        await handle.result()
    except WorkflowFailureError as error:
        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
    state = (await handle.describe()).status
    attempts = [
        event.activity_task_started_event_attributes.attempt
        async for event in handle.fetch_history_events()
        if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_STARTED
    ]
    seen = f"attempts of charge in the history: {attempts[-1]}"
    if cause is not None:
        seen += f"; {cause}"
    print(json.dumps({"state": state.name if state else "?", "seen": seen}))


async def reset(client: Client) -> None:
    """As `temporal workflow reset` does, to the workflow task that asked for the charge."""
    handle = client.get_workflow_handle(ID)
    asked = [
        event.activity_task_scheduled_event_attributes.workflow_task_completed_event_id
        async for event in handle.fetch_history_events()
        if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED
    ]
    await client.workflow_service.reset_workflow_execution(
        ResetWorkflowExecutionRequest(
            namespace=client.namespace,
            workflow_execution=WorkflowExecution(workflow_id=ID),
            workflow_task_finish_event_id=asked[-1],
            request_id="reset-1",
            reason="the charge timed out",
        )
    )


async def main() -> None:
    client = await Client.connect(ADDRESS)
    if MODE == "worker":
        await work(client)
    elif MODE == "begin":
        attempts = int(REST[0]) if REST else 0
        handle = await client.start_workflow(Order.run, attempts, id=ID, task_queue=QUEUE)
        await handle.signal(Order.approve)
    elif MODE == "end":
        await end(client)
    else:
        await reset(client)


asyncio.run(main())
sys.stdout.flush()
os._exit(0)  # temporalio 1.35.0 now and then aborts while the interpreter ends
