"""A chat that stays open: a turn handler that can be steered, answers follow-ups, and waits.

No key and no network: the model is a function. Each turn ends with a commit, and the run then
waits for a message or an hour, with no process that has to remember it.

    runfold run examples/turn_agent.py:agent --id chat --input "the VPN is down" --store ./runs
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from runfold import JSON, SAFE, Call, Complete, Context, Continue, Next, ToolCall, turn

SILENCE = timedelta(hours=1)


async def model(talk: list[list[str]]) -> JSON:
    """Stands for a model: it answers everything that was said since its last answer."""
    answers = [n for n, (who, _) in enumerate(talk) if who == "agent"]
    since = talk[answers[-1] + 1 :] if answers else talk
    said = [text for who, text in since if who == "user"]
    known = [text for who, text in since if who == "tool"]
    return f"About {' and '.join(said)}: {known[-1]}."


async def search(query: str) -> str:
    """Stands for a knowledge base."""
    return f"nothing is known of {query}"


async def look_up(call: ToolCall) -> JSON:
    query: Any = call.input
    return await search(query)


@turn("chat")
async def agent(ctx: Context) -> Next:
    """One turn: take what was said, look it up, answer, wait.

    What happens outside stands in `ctx.tool` and `ctx.model`: when the process dies in the middle,
    the next one gets their recorded results and goes on from there.
    """
    talk: Any = ctx.load_checkpoint() or []
    if ctx.iteration == 0:
        talk.append(["user", ctx.input])
    else:
        said = (*await ctx.place_inputs("follow_up"), *await ctx.place_inputs("steer"))
        if not said:
            return Complete("Closed: nothing was said for an hour.")
        talk += [["user", message.content] for message in said]

    question = talk[-1][1]
    found = await ctx.tool(Call(name="search", input=question, fn=look_up, replay=SAFE))
    talk.append(["tool", found.output])

    # Whoever speaks while the agent works is heard before it answers.
    talk += [["user", message.content] for message in await ctx.place_inputs("steer")]
    answer = await ctx.model(lambda: model(talk))
    talk.append(["agent", answer])

    if "bye" in question:
        return Complete(answer)
    return Continue(state=talk, until_input=True, delay=SILENCE)
