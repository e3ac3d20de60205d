"""How a pass recognises a PLE subgraph: a candidate by its anchor, roles by data flow, acceptance by probing."""
