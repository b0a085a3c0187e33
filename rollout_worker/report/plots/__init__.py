"""The plots of a report, as Plotly figures."""
