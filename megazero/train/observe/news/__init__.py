"""news: a run, told to whoever is elsewhere: services that track it, a webhook, a forecast of its end."""
