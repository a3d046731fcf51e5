"""Graphs of a slide: who is whose neighbour, how much an edge counts, the flow, and patches."""

from pdvi.gr.build import flow, flow_graph, knn_graph, partition, radius_graph, to_squidpy, weights

__all__ = ["flow", "flow_graph", "knn_graph", "partition", "radius_graph", "to_squidpy", "weights"]
