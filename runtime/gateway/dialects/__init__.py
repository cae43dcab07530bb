"""Other forms of a chat request, translated to chat and back: OpenAI's Responses, Anthropic's Messages.

A request is sampled as a chat request and by nothing else, so everything that holds there holds here: exact
ids, turns that go on from one another, names, receipts, refusals. `endpoint.py` stands around the chat route;
each dialect has a file that reads its requests and one that writes its answers.
"""
