"""Webhooks: events that are told to the endpoints of clients, signed, again and again until they are taken."""
