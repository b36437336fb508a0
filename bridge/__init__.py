"""bridge: signals over NATS, HTTP and a page. Empty as yet: it comes with the bridge issue."""
