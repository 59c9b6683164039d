// SPDX-License-Identifier: AGPL-3.0-or-later
/** What we know about the addresses we receive mail for. */
import * as Context from "effect/Context"
import type * as Effect from "effect/Effect"
import type { DatabaseError } from "./DatabaseError.ts"

/**
 * local: mail for `mailbox` here · unknown: our domain, nobody of that name (550 5.1.1) ·
 * foreign: not our domain (550 5.7.1 for strangers).
 */
export type Resolution =
  | { readonly _tag: "Local"; readonly mailbox: string }
  | { readonly _tag: "Unknown" }
  | { readonly _tag: "Foreign" }

export class Accounts extends Context.Service<
  Accounts,
  {
    /**
     * How each of `addresses` (1 to 1,000) is handled, in their order. The domain compares without
     * regard to case; a mailbox is found with and without its +detail.
     */
    readonly resolve: (
      addresses: ReadonlyArray<string>
    ) => Effect.Effect<ReadonlyArray<Resolution>, DatabaseError>
  }
>()("pepsi/services/Accounts") {}
