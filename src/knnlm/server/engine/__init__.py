"""The batched generation engine behind the server and the chat. Contains no HTTP."""
