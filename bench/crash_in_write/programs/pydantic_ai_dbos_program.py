"""pydantic-ai on DBOS: a durable agent whose tool requires approval, which comes as a DBOS
message. `DBOS.launch()` recovers what was pending.

usage: pydantic_ai_dbos_program.py begin|recover FOLDER
"""

import asyncio
import json
import sys

import ledger
from dbos import DBOS, DBOSConfig, SetWorkflowID
from pydantic_ai import Agent, DeferredToolRequests, DeferredToolResults
from pydantic_ai.durable_exec.dbos import DBOSDurability
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

MODE, FOLDER = sys.argv[1:]
ID = "order-1"
END_WAIT_S = 30


def script(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    if any(isinstance(message, ModelResponse) for message in messages):
        return ModelResponse(parts=[TextPart("Paid.")])
    return ModelResponse(parts=[ToolCallPart("charge", {"amount": 10}, tool_call_id="c1")])


agent = Agent(
    FunctionModel(script),
    name="till",
    output_type=[str, DeferredToolRequests],
    capabilities=[DBOSDurability()],
)


@agent.tool_plain(requires_approval=True)
@DBOS.step()
async def charge(amount: int) -> str:
    return ledger.charge(amount)


@DBOS.workflow()
async def order(prompt: str) -> str:
    asked = await agent.run(prompt)
    if not isinstance(asked.output, DeferredToolRequests):
        return asked.output
    approved = await DBOS.recv_async("approval", timeout_seconds=60)
    answers = {call.tool_call_id: bool(approved) for call in asked.output.approvals}
    done = await agent.run(
        message_history=asked.all_messages(),
        deferred_tool_results=DeferredToolResults(approvals=answers),
    )
    return str(done.output)


async def main() -> None:
    url = f"sqlite:///{FOLDER}/dbos.sqlite"
    config: DBOSConfig = {"name": "till", "system_database_url": url}
    DBOS(config=config)
    DBOS.launch()
    if MODE == "begin":
        with SetWorkflowID(ID):
            handle = await DBOS.start_workflow_async(order, "charge 10")
        await DBOS.send_async(ID, True, "approval")
        await handle.get_result()
        return
    handle = await DBOS.retrieve_workflow_async(ID)
    await asyncio.wait_for(handle.get_result(), END_WAIT_S)
    status = await DBOS.get_workflow_status_async(ID)
    steps = [step["function_name"] for step in await DBOS.list_workflow_steps_async(ID)]
    seen = f"recovery_attempts={status.recovery_attempts}; steps {', '.join(steps)}"
    print(json.dumps({"state": status.status, "seen": seen}))
    DBOS.destroy()


asyncio.run(main())
