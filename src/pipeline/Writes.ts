// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The named side writes a verdict may carry. Settle runs `pepsi.write_NAME` once for all calls of
 * a batch; a call "wins" when it changed what it meant to change, and an emission may depend on
 * that. A migration adds a write by creating such a function; this file gives it its type. Pure.
 */
import * as Duration from "effect/Duration"

/** One call of `pepsi.write_NAME`; durations in seconds, times are the database's own. */
export interface Write {
  readonly name: string
  readonly args: { readonly [name: string]: string | number | boolean | null }
}

/**
 * Claims the right to answer `sender` in the name of `recipient`; wins at most once per interval
 * (RFC 3834 section 2).
 */
export const claimReply = (
  recipient: string,
  sender: string,
  interval: Duration.Duration
): Write => ({
  name: "claim_reply",
  args: { recipient, sender, interval: Duration.toSeconds(interval) }
})

/** Remembers that `address` has written to `peer`; wins when that is new. */
export const whitelistUpsert = (
  address: string,
  kind: "address" | "domain",
  peer: string
): Write => ({
  name: "whitelist_upsert",
  args: { address, kind, peer }
})
