"""Streams of devices on which communication runs beside computation, and the events that order them.

communication_streams  CommunicationStreams: the communication streams of a rank; wait: the only wait of a stream
device_graph           DeviceGraph: work that is recorded once and queued by one call
host_copy              copies to the host, for messages that a thread sends
stream_times           StreamTimes: when work on these streams runs, for traces
ticket                 Ticket: a conversion that is queued on a communication stream
"""
