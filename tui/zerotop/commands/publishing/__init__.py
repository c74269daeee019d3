"""What other programs are told of a running job: notifications and metrics, by a process of its own beside the job.

No module here is imported by the process that starts or shows the job, except ``companion``.
"""
