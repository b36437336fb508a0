"""worker: the agent loop, tools, gate, `run()`, and the embedded server.

Reading order: tools, gate, agent, replies (what becomes of a reply), loop, runner.
"""
