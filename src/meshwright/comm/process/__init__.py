"""The communicator with one process per rank.

process_communicator   init_process, ProcessCommunicator: collectives over the transports of the platforms
transfers              Transfers: the movement of data by the transports of groups
device_choice          default_transport, use_device: the transport and the device of a process
flat_tensors           flat_joined, unpacked: tensors as one row, as transports move them
flight_record          Record: the last 200 calls of a rank, written as JSON when a call fails
small_calls            is_small, results_of: collectives whose data travels in the frames that compare the call
late_messages          LateMessages: messages that a thread receives while the host goes on
retained_memory        keep_memory: freed memory stays in the process for the next training step
"""
