"""General process utilities: child processes, an embedded Redis server, and small HTTP servers."""
