// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Accounts by rule: the domains we receive for, and which local parts in them exist. Nothing is
 * looked up; the answer is a matter of the configuration.
 */
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Address from "../src/mail/Address.ts"
import { Accounts } from "../src/services/Accounts.ts"
import type { Resolution } from "../src/services/Accounts.ts"

export interface Settings {
  readonly domains: ReadonlyArray<string>
  /** Between a mailbox and its detail; "" = none. */
  readonly delimiter: string
  /** `any`: every name that is safe as the name of a directory; else these names, in any case. */
  readonly localParts: "any" | ReadonlyArray<string>
}

/**
 * Names that `any` stands for. A mailbox becomes a directory, so no separator, no leading dot and
 * no difference by case; 64 octets are the local part of RFC 5321 section 4.5.3.1.1.
 */
const anyName = /^[a-z0-9_-][a-z0-9._-]{0,63}$/

/** RFC 5321 section 4.5.1 and RFC 2142 section 4: whoever has a domain can be written to. */
const always = ["postmaster", "abuse"]

export const AccountsConfig = (settings: Settings): Layer.Layer<Accounts> => {
  const domains = new Set(settings.domains.map(Address.domainToAscii))
  const names =
    settings.localParts === "any"
      ? undefined
      : new Set([...always, ...settings.localParts.map((name) => name.toLowerCase())])

  const resolveOne = (text: string): Resolution => {
    const address = Address.parse(text)
    if (address === undefined) return { _tag: "Foreign" }
    if (!domains.has(Address.domainToAscii(address.domain))) return { _tag: "Foreign" }
    const whole = address.local.toLowerCase()
    const mailbox = [whole, Address.splitDetail(whole, settings.delimiter).name].find(exists)
    return mailbox === undefined ? { _tag: "Unknown" } : { _tag: "Local", mailbox }
  }
  const exists = (name: string): boolean =>
    names === undefined ? anyName.test(name) : names.has(name)

  return Layer.succeed(
    Accounts,
    Accounts.of({
      resolve: (addresses) => Effect.succeed(addresses.map(resolveOne))
    })
  )
}
