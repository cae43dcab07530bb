"""The whole product from outside: the real `launch`, real vLLM, real torchtune, real signals."""
