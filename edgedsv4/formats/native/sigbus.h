/* Prototypes of the SIGBUS guard; read by cffi and by the C compiler. All are called under a lock of the Python side,
   except the two `tripped` queries, which any thread may call at any time. */

/* Installs the handler. Returns 0, or an errno. */
int dsv4_sigbus_install(void);

/* Puts the previous handler back; slots stay registered for a later install. Returns 0, or 1 when another handler lies
   on top of ours, which then only passes signals on. */
int dsv4_sigbus_uninstall(void);

/* Guards the pages of [address, address + nbytes). Returns a slot, or minus the table size when the table is full. */
int dsv4_sigbus_register(uintptr_t address, size_t nbytes);

/* Frees a slot; the memory must still be mapped. */
void dsv4_sigbus_unregister(int slot);

/* 1 if a page of this slot had to be replaced by zeros, else 0. */
int dsv4_sigbus_tripped(int slot);

/* 1 if that happened to any slot in use, else 0. */
int dsv4_sigbus_any_tripped(void);
