/* What a job does that cannot go on; for host_experts.c. */

#ifndef DK_HOST_DESK_H
#define DK_HOST_DESK_H

/* Have the job done by whoever takes orders, and return when it is, or was refused. */
void dk_desk_ask(dk_desk *desk, dk_host_job *job);

#endif
