"""The client side of campaigns, over HTTP alone: it runs on any machine that reaches the API."""
